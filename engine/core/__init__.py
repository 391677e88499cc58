"""What everything else speaks of: trees, batches, requests' parameters, the drafter's protocol, errors.

No sockets, no models, no threads. Imports the standard library, numpy, torch and `engine.core` alone.
"""
