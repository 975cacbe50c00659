"""Output of commands: ``table.py`` formats text tables and bytes, ``plot.py`` draws pictures in the style of
``palette.py``.
"""
