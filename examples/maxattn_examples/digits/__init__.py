"""Moving handwritten digits: clips drawn on the device, which Wan's network learns.

`scenes.py` draws several coloured digits that cross, leave the picture and come back, which a model
can get wrong. `torus.py` draws one that moves for ever, for streaming models. `words.py` has their
prompts, `settings.py` and `task.py` the training by train.py, also of a student of few steps.
`judge.py` classifies and tracks digits, and scores clips; `stream_demo.py` streams videos and
judges them. `latents.py` makes a folder of latents for any model.
"""
