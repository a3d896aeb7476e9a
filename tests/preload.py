"""What the processes of tests need, imported once in the process that they are forked from; and no thread is left running."""

import gc
import threading

import peft  # noqa: F401
import transformers

import symbiosis.cli  # noqa: F401
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
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join(60)  # transformers does not wait for those that loaded the weights
assert threading.active_count() == 1
gc.collect()
gc.freeze()  # a collection in a child would look at every object, and so copy the memory that it shares with this process
