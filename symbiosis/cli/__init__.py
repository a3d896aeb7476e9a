"""The commands `symbiosis` and `symbiosis-executor`, and what they find out: doctor, top, pads, convert."""
