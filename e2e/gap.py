"""A relay between an engine's KV event socket and the router that loses batches when it is told to.

The router subscribes here and replays at the engine itself: what is lost on the way is there to be asked for.
"""

import threading

import zmq


class Relay:
    """Passes published batches on; loses so many of the next ones."""

    def __init__(self, source, endpoint):
        self.lose = 0
        self.lost = 0
        self.passed = 0
        self.context = zmq.Context()
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.connect(source)
        self.subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        self.publisher = self.context.socket(zmq.PUB)
        self.publisher.bind(endpoint)
        self.running = True
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while self.running:
            if not self.subscriber.poll(200):
                continue
            frames = self.subscriber.recv_multipart()
            if self.lose > 0:
                self.lose -= 1
                self.lost += 1
            else:
                self.publisher.send_multipart(frames)
                self.passed += 1

    def stop(self):
        self.running = False
        self.thread.join()
        self.context.destroy(linger=0)
