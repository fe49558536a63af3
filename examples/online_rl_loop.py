from agl_slime import OnlineRLLoop as OnlineRLLoop
