from .linear import *
