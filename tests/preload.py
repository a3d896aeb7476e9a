"""What the processes of tests need, imported once in the process that they are forked from; and no thread is left running."""

import threading

import peft  # noqa: F401
import transformers

import symbiosis.client.build  # noqa: F401
import symbiosis.executor.daemon  # noqa: F401
import symbiosis.transport.local  # noqa: F401
import symbiosis.transport.local_client  # noqa: F401
import symbiosis.transport.zeromq  # noqa: F401
import symbiosis.transport.zeromq_client  # noqa: F401
import tests.processes  # noqa: F401
from symbiosis.executor.load import load_model

transformers.utils.logging.disable_progress_bar()
load_model("demo")  # transformers compiles hundreds of patterns at the first model
assert threading.active_count() == 1
