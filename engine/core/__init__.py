"""The nouns of everything else: trees, batches, requests' parameters, the drafter's protocol, errors.

There are no sockets, no models and no threads here. The folder imports the standard library, numpy, torch, msgspec and
`engine.core` alone.
"""
