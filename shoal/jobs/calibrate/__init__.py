from shoal.jobs.calibrate.main import main as main
