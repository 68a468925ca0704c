"""Training: one loop for every model of the examples. It knows no model; a `Task` (task.py) tells it what to learn.

settings   the keys that every run has          latents    a folder of latents and texts, as a source of examples
task       what a model brings                  data       batches in a seeded order, resumed from one number
state      what a step changes, on the mesh     step       one step: gradients, clipping, AdamW, the average
lora       low-rank layers beside projections   loop       steps, checkpoints, bar, TensorBoard, profile, pictures
checkpoint what a killed run goes on from       export     the result, as diffusers reads it
"""
