"""Training: one loop for every model of the examples. It knows no model; a `Task` (task.py) tells
it what to learn.

settings    the keys that every run has          task        what a model brings
latents     a folder of examples, read           shards      the same, written
data        batches in a seeded order            state       what a step changes, and where it lies
step        gradients, clipping, AdamW, average  lora        low-rank changes beside projections
loop        checks, then steps                   checkpoint  what a killed run goes on from
progress    the bar                              board       TensorBoard
cost        operations, and MFU                  profiler    a profile of some steps
samples     pictures along the way               export      the result, as diffusers reads it
flow        times and noise of flow matching     hosts       many processes as one
"""
