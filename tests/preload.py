"""What the processes of tests need, imported once in the process that they are forked from; and no thread is left running."""

import gc
import threading

import peft  # noqa: F401
import torch
import transformers
import typer

import symbiosis.client.from_executor  # noqa: F401
import symbiosis.executor.daemon  # noqa: F401
import symbiosis.transport.local.client  # noqa: F401
import symbiosis.transport.local.listener  # noqa: F401
import symbiosis.transport.tcp.client  # noqa: F401
import symbiosis.transport.tcp.listener  # noqa: F401
import tests.processes  # noqa: F401
from symbiosis.cli.main import executor_app
from symbiosis.executor.model.load import load_model
from symbiosis.executor.model.store import Store
from symbiosis.kernels.few_rows import FewRows
from tests.conftest import tiny_llama

torch.set_num_threads(1)  # others would not survive the fork
typer.main.get_command(executor_app).make_context("symbiosis-executor", ["demo"])  # typer imports when it parses
transformers.utils.logging.disable_progress_bar()
load_model("demo")  # transformers compiles hundreds of patterns at the first model
FewRows(Store(tiny_llama()).linear_weights())  # and oneDNN code for each shape
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join(60)  # transformers does not wait for those that loaded the weights
assert threading.active_count() == 1
gc.collect()
gc.freeze()  # a collection in a child would look at every object, and so copy the memory that it shares with this process
