"""What the command starts: `cli` is the command itself, `explore` the explorer, `traces` what `pipeflow explain` reads,
and `calibration` measures a machine. Nothing else imports from here.
"""
