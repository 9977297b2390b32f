from shoal.roles.trainer.trainer import Trainer, main

__all__ = ["Trainer", "main"]
