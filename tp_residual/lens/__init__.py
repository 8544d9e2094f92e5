"""Looking into a sharded residual stream: who wrote what, how much of the answer it is, and what the stream says on the way.

    request = LensRequest(top=5)                       tp_residual.lens.request
    found = look(model, [[1, 2, 3]], request)          tp_residual.lens.run, on every rank; the same values on all of them
    found[0].components                                tp_residual.lens.result

A dot product with a sum is the sum of the dot products, so a summand is never completed to say how much of it points in a direction:
each rank multiplies what it holds, and scalars cross ranks.
"""
