"""Ways of sampling compared clip by clip, beside plain steps of equal cost.

`ways.py` reads them, `runner.py` runs one, `report.py` has the table and its file, `curve.py`
measures MagCache's curve, `pictures.py` compares decoded pictures.
"""
