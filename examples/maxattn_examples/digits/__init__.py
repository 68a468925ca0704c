"""Moving handwritten digits that Wan's own network learns, made on the device while it does.

`scenes.py` has several coloured digits that cross, leave the picture and come back: a model of them
can fail. `torus.py` has one that moves for ever, for models that stream. `words.py` are their
prompts, `settings.py` and `task.py` what train.py trains, `distil.py` a student of few steps.
`judge.py` names digits and follows them; `scores.py` scores clips, `drift.py` the videos that
`stream_demo.py` streams. `latents.py` makes a folder of latents for any model.
"""
