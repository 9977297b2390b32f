from shoal.roles.calibrate.role import main as main
