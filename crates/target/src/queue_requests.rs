//! The requests to the reactors to add and remove their queues of drives, and listeners, while they run.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use riopipe_media::Queue;
use riopipe_net::Listener;
use riopipe_session::auth::tls::Demand;

use crate::counters::Counters;
use crate::mail::Mailboxes;

/// A listener of the target, with the id of its port.
pub(crate) struct Port {
    pub(crate) id: u16,
    /// Whether hosts may or must use TLS there; `None` if there is no TLS.
    pub(crate) tls: Option<Demand>,
    pub(crate) listener: Listener,
}

/// A request to one reactor about its queue of the drive of a namespace, or about a listener. Only the
/// first reactor has listeners.
pub(crate) enum QueueRequest {
    /// Watch this listener, and accept no connection there yet.
    AddPort(Port),
    /// Accept connections at the ports with these ids from now on.
    OpenPorts(Vec<u16>),
    /// Close the listeners of the ports with these ids.
    RemovePorts(Vec<u16>),
    /// Use this queue for the namespace with this index from now on. No connection knows the
    /// namespace yet.
    Add { index: usize, queue: Box<dyn Queue>, counters: Arc<Counters> },
    /// Drop the queue of the namespace with this index as soon as no operation of it is in flight.
    /// No connection uses the namespace any more.
    Remove { index: usize },
}

/// The answer of a reactor: why the request has failed, if it has.
pub(crate) type RequestAnswer = Result<(), String>;

/// A request, with the place for the answer.
pub(crate) type AskedRequest = (QueueRequest, Sender<RequestAnswer>);

/// The requests for one reactor.
pub(crate) type RequestReceiver = Receiver<AskedRequest>;

/// The way to each reactor.
pub(crate) struct QueueRequests {
    senders: Vec<Sender<AskedRequest>>,
}

impl QueueRequests {
    /// For this number of reactors. Also returns what each of them receives.
    pub(crate) fn new(reactors: usize) -> (Self, Vec<RequestReceiver>) {
        let (senders, receivers) = (0..reactors).map(|_| channel()).unzip();
        (Self { senders }, receivers)
    }

    /// Sends each reactor its request, in the reactors' order, and wakes them. With fewer requests than
    /// reactors, the first ones get them. Each of these reactors sends one answer. A reactor that has ended sends none, and the channel closes without it.
    pub(crate) fn ask<M>(
        &self,
        requests: impl IntoIterator<Item = QueueRequest>,
        mailboxes: &Mailboxes<M>,
    ) -> Receiver<RequestAnswer> {
        let (answer, answers) = channel();
        for (sender, request) in self.senders.iter().zip(requests) {
            // An error means that the reactor has ended. Its answer is missing then.
            let _ = sender.send((request, answer.clone()));
        }
        mailboxes.wake_all();
        answers
    }

    /// The number of reactors.
    pub(crate) fn reactor_count(&self) -> usize {
        self.senders.len()
    }
}
