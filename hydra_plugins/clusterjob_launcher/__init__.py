"""The Hydra launcher `hydra/launcher=clusterjob`: each job of a sweep as a clusterjob job."""
