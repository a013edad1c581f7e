WORD = "helped"
