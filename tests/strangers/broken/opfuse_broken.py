raise RuntimeError("this plugin cannot be imported")
