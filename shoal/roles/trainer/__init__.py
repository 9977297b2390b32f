from shoal.roles.trainer.role import Trainer, main

__all__ = ["Trainer", "main"]
