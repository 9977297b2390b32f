from shoal.roles.coordinator.role import main

__all__ = ["main"]
