def info(): "x"
