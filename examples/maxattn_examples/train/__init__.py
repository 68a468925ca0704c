"""Training: one loop for every model of the examples. It knows a model by its `Task` alone.

settings    the keys that every run has          task        what a model brings
latents     a folder of examples, read           shards      the same, written
data        batches in a seeded order            state       what a step changes, and where it lies
step        gradients, clipping, AdamW, average  lora        low-rank changes beside projections
loop        checks, then steps                   checkpoint  what a killed run goes on from
progress    the bar                              board       TensorBoard
cost        operations, and MFU                  profiler    a profile of some steps
samples     pictures along the way               export      the result, as diffusers reads it
flow        times and noise of flow matching     opening     what a run prints first
forcing     a noise for each block           self_forcing  learning from an own rollout
flow_settings  of flow matching              forcing_settings  of forcing
shape_errors  data that a model cannot take      latent_task the shared part of real models' tasks
"""
