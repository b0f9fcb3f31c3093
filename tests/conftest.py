import signal

# A shell starts background jobs with SIGINT ignored, and their children inherit it; tests interrupt theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
