"""The commands beside the executor: doctor, top, pads, audit, demo."""
