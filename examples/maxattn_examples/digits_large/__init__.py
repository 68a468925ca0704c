"""Several coloured digits that cross, leave the picture and come back: a video model that can fail.

`words.py` writes and encodes prompts, `scenes.py` draws what happens in a clip, `clips.py` renders
it on the device. `settings.py` and `task.py` train Wan's transformer on it, `distil.py` a student
of few steps. `scores.py` judges clips, for examples/compare.py.
"""
