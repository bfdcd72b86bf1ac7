"""Does compression pay here, and which? `horovodrun -np N horovod-sparse advise` asks this.

The steps of each candidate are rehearsed on the ranks and the link that are there: a stretch of computing as long as
the model's, then a real exchange of random gradients of the model's size. `ranks` has the collectives, `script` finds
out how a user's script trains, `rehearsal` takes the time, `advice` draws the conclusion.
"""
