"""The scheduler's core: plain values and rules. No grpc, asyncio, redis or torch is imported below this package."""
