"""Whether to send a product or compute it locally. Sending pays only if the call is batched with others, or gives way to them."""

DECODE_ROWS = 16  # as many rows as this, made without gradients, are taken for tokens that somebody waits for
WORTH_BATCHING = 12 << 20  # bytes of a weight: to read such once for several clients saves more than their calls cost


def should_send(rows: int, nbytes: float, training: bool, others: int, give_way: bool) -> bool:
    """Whether a product of `rows` rows should be sent to the executor.

    Args:
        nbytes: Size of this model's weights, on average: clients meet only if they take the same way layer after layer.
        others: How many other sessions decode whose few rows could be batched with these.
        give_way: Whether any makes tokens to which training gives way in the executor.

    >>> should_send(1, 64 << 20, training=False, others=0, give_way=False)
    False
    >>> should_send(1, 64 << 20, training=False, others=3, give_way=True)
    True
    >>> should_send(512, 64 << 20, training=True, others=3, give_way=True)
    True
    """
    if training:
        return give_way
    return others > 0 and rows <= DECODE_ROWS and nbytes >= WORTH_BATCHING
