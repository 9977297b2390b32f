from shoal.roles.coordinator.main import main

__all__ = ["main"]
