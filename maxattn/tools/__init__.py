"""The tools around attention: command line, measuring, tuning, compiling. No module outside of
this package imports it.
"""
