"""Prove a sharded run: against the unsharded oracle, against the reference executor, forwards and backwards, and through dumps.

    verify(model_dir, group, sequences, text=True)    load and compare every state, update and the logits (`verify_model`: a built model)
    verify_against_reference(model, sequences)        the executor's bits against `reference`'s
    verify_backward(model, weights, sequences)        every gradient
    dump_run, read_dump, compare_dumps                files that two runs of any framework can be compared by
    faults.inject(model, kind, layer)                 faults to order, each of which `verify` names

docs/verify.md says what is judged and why; docs/dump_format.md what the files hold.
"""
