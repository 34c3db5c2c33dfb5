"""This machine: one agent, one process per GPU, or two on CPU."""

from ddp_train.config.cluster import environment_of, max_restarts, processes_of_nodes
from ddp_train.errors import NO_PROGRESS
from ddp_train.launch.agent_process import AgentOptions, agent_arguments, rank_environment, start_agent_and_wait
from ddp_train.launch.job import Job
from ddp_train.run_folder.starts import close_before_start, forget_starts
from ddp_train.run_folder.verdict import exit_code_after_agent
from ddp_train.system import process_env


def run_on_this_machine(job: Job) -> int:
    """Run a job on this machine to its end and return its exit code.

    The agent finds a free port itself: any number of runs share a machine.
    """
    if not job.is_run:
        return _start_ranks_and_wait(job)
    if job.checkpoint is not None:  # a person has chosen it
        forget_starts(job.run_folder)
    if no_progress := close_before_start(job.run_folder):
        no_progress.show(job.run_folder)
        return NO_PROGRESS
    before = job.run_folder.read_result()
    return exit_code_after_agent(job.run_folder, _start_ranks_and_wait(job), before=before)


def arguments_for(job: Job) -> list[str]:
    """Return torchrun's arguments for the agent that runs a job on this machine."""
    cluster = job.config.cluster
    return agent_arguments(processes_of_nodes(cluster)[0], max_restarts=max_restarts(cluster, {}) if job.is_run else 0)


def _start_ranks_and_wait(job: Job) -> int:
    config, cluster = job.config, job.config.cluster
    environment = rank_environment(processes_of_nodes(cluster)[0], cluster.threads_per_process) | environment_of(cluster.env)
    run_folder, uses_torch_agent = job.run_folder if job.is_run else None, cluster.agent == "torch"
    options = AgentOptions(grace_s=cluster.grace_s, run_folder=run_folder, uses_torch_agent=uses_torch_agent)
    environment = {**environment, process_env.JOB: job.to_json()}
    return start_agent_and_wait(options, arguments_for(job), environment=environment, uses_compiler=config.uses_compiler)
