"""Rollouts in a process of their own, whose Python does not wait for the trainer's, nor the trainer for it.

| trainer's process      |                        | process of the rollouts, forked from it |
|------------------------|------------------------|-----------------------------------------|
| `RolloutProcess.sample`| ── order ──►           | `Work.sample`                           |
|                        | ◄── ids of each turn   |                                         |
|                        | ◄── the group          |                                         |
"""
