"""The engine room: models, requests, scheduler, batches, sampling, text and the pool. `engine.api` is its hinge."""
