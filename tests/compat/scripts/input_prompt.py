"""input() asks before files are overwritten: scripts with `Overwrite? [y/N]`."""

answer = input("Overwrite? [y/N] ")
print("answer", answer)
