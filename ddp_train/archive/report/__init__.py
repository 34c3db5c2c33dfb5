"""`ddp-train report`: runs as one page that needs no network and no server, and their curves as SVG for a paper. Imports no torch.

page        the page: runs, what they have in common, and the program that shows them (page.js, page.css, uplot/)
curves      a run's curves: thinned, with marks of what happened to it
evaluation  predictions: confusion, calibration, the answer to each sample
samples     images and texts of callbacks, from TensorBoard's files
time_split  where the time went, by step and by rank
importance  which of the swept keys the metric depends on
packed      many numbers as text
figures     curves as SVG
"""
