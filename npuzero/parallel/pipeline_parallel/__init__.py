"""Pipeline parallelism: stages, schedules and the runner."""
