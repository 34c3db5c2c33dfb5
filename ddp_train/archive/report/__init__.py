"""`ddp-train report`: runs as one page that needs no network and no server, and their curves as SVG for a paper. Imports no torch.

page.py describes each run, by the other modules, and writes it into page.html with the program that shows it (page.js, page.css, uplot/).
"""
