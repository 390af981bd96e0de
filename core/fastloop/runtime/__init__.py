"""The process that trains: its clock, files, hardware and random states. Nothing here knows a run.

clock, regions            # seconds by phase, and names of phases for a profiler
memory                    # its peak, and what the process holds now
files, step_folders       # durable files, and the folders of checkpoints
json_text                 # values as JSON
hardware, platform_support   # the device, and services that some platforms lack
random_states             # seeded, saved and restored
device_copies             # batches, copied to the device
host_copies               # numbers of the device, read without waiting for it
forks                     # processes that are forked, without standard input
delayed_imports           # libraries that few runs use, imported when something uses them
compiled_modules          # the wrapper that torch.compile returns
tracebacks, main_module   # the line of user code that failed, and the script that trains
"""
