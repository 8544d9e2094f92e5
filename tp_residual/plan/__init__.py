"""How long a forward pass takes and what it holds, on hardware described by a file: which tp size, TP or SP, one node or several.

`hardware` describes machines, `collectives` and `boundary` say what crosses between ranks, `forward` adds up a pass, `estimate` compares
layouts. None of these needs torch. `measure` describes this machine and `check` holds predictions against it; both need torch.
"""
