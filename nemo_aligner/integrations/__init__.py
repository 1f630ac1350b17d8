"""Glue code for RL trainers that use rewards of this package's models.

``trl.py``             a reward function for TRL's GRPOTrainer, on running servers
``nemo_rl.py``         an environment for NeMo RL, on running servers or in process
``in_process.py``      a scorer in the trainer's process, whose weights can leave the GPU while idle
``nemo_gym.py``        copies ``resources_servers/reward_model`` into a checkout of NeMo Gym
``resources_servers``  the environment for NeMo Gym: ``app.py`` is the verifier, ``servers.py``
                       queries servers or starts one; the folder is not a package here, because Gym
                       imports the copy in its checkout

Importing a module of this package does not import the RL trainer. Trainers that send HTTP requests
(OpenRLHF, slime, verl with vLLM) need no glue: ``serving/protocols`` answers them.
"""
