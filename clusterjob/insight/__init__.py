"""Answers to questions of a person about a job: its stacks, metrics, efficiency and report.

Nothing here runs on a node. `sample_files` reads the metrics for all. For `top`, `live_jobs` polls
jobs, `live_node` reads one node's files while they grow, and `live_output` those with output. For
the report, `job_clock` aligns the clocks of nodes and `job_times` places events.
"""
