"""The tools around attention: the command line, measuring, tuning, compiling. Nothing outside of
them imports one.
"""
