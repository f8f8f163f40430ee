"""Rollouts in other processes, on this machine or on others, whose Python does not wait for the trainer's.

| trainer's process    |                        | sampler                     |
|----------------------|------------------------|-----------------------------|
| `SamplerPool.sample` | ── order ──►           | `Work.sample`, in `worker`  |
|                      | ◄── ids of each turn   |                             |
|                      | ◄── the group          |                             |
"""
