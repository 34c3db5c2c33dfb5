"""Data sources, and what reads them.

A source is one class per kind of data, one instance per split, a whole batch per read. `order` and `draw` say what comes when, `loader`,
`reader` and `workers` read it, `stream` does so for data without positions, `device` copies it.
"""
