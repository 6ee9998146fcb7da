"""One worker of a torchrun job that resumes by itself; started by test_resume_torchrun.py.

``resume_job.py FOLDER NAME STEPS [WHAT AT]`` goes on from the newest checkpoint in the folder, or
from the beginning, and trains up to that step. It writes down what it does under that name. Once it
has begun to save the step ``AT``, what happens is ``die``: the last rank kills itself, in the job's
first life; or ``wait``: all ranks wait to be killed.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from resume_training import live


def main():
    folder, name, steps, *harm = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]

    def saving(step):
        if harm == ["wait", str(step)]:
            signal.pause()
        if harm == ["die", str(step)] and rank == dist.get_world_size() - 1 and life == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    live(rank, Path(folder), f"{name}-{life}", int(steps), saving=saving)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
