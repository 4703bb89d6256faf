"""The command line `toolspec`: look at, check and convert what the other packages train on and parse."""
