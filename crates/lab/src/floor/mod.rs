//! The floor: the same bytes between the same threads, without Rio. It is the lower bound of cost.
//!
//! One writer thread sends a 72-byte header with its payload, as large as an NVMe/TCP command
//! capsule with in-capsule data. The server copies the payload into the drive that a target would
//! use, and answers with 24 bytes, as large as a response capsule. There is no session, no log, and
//! no check beyond those that keep a broken peer from crashing it. It uses the best known methods:
//! many messages per system call, large receives, one send that answers all messages of a receive,
//! and polling before sleeping on both sides.
//!
//! It shows the limit of the machine; engines are compared with it as ratios.

mod message;
mod server;
mod writer;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use riopipe_media::{Drive, OpenError};
use riopipe_net::{
    AcceptError, ConnectError, LinkError, ListenError, Listener, PinError, PollerError,
    SocketOptions, SpinPolicy,
};
use riopipe_platform::CpuClock;

use crate::{
    harness::{self, Window},
    link::{Link, LinkModel, LinkStartError},
    sample::Sample,
    workload::{Shape, Workload, WorkloadError},
};

pub use message::{ANSWER_LEN, HEADER_LEN};

/// The parameters of a run.
#[derive(Clone, Debug)]
pub struct FloorOptions {
    /// The workload. Each write of a batch or a journal transaction is a message of its own, as for
    /// an engine without merging.
    pub workload: Workload,
    /// Duration of the run.
    pub window: Window,
    /// Writer `i` runs on core `i mod n` of these; empty: on any core.
    pub writer_cores: Vec<usize>,
    /// One server thread on each of these cores, at most one per writer; empty: one thread on any
    /// core.
    pub server_cores: Vec<usize>,
    /// How both sides wait.
    pub spin: SpinPolicy,
    /// Socket options of both sides.
    pub socket: SocketOptions,
    /// The modelled link between the two sides; `None`: loopback alone.
    pub link: Option<LinkModel>,
}

/// The reason why the floor could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum FloorError {
    /// The workload is invalid, or too large for this drive.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// A core is not available.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// There is no port to listen on.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Connecting over loopback failed.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// No descriptors are left.
    #[error(transparent)]
    Accept(#[from] AcceptError),
    /// The connection failed.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The modelled link could not be started.
    #[error(transparent)]
    LinkStart(#[from] LinkStartError),
    /// No descriptors are left.
    #[error(transparent)]
    Poller(#[from] PollerError),
    /// The drive can't be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The drive did not complete a write within the call, so it is not in memory.
    #[error(
        "the floor needs a drive that finishes a write within the call (mem:), not {drive}: {why}"
    )]
    Drive {
        /// Description of the drive.
        drive: String,
        /// The drive's answer.
        why: String,
    },
    /// The other side broke the protocol: a bug in this module.
    #[error("the raw exchange broke down: {0}")]
    Protocol(&'static str),
}

/// Runs the exchange once, writing to `drive` (`mem:…`).
///
/// # Errors
/// [`FloorError`].
pub fn run(options: &FloorOptions, drive: &Arc<dyn Drive>) -> Result<Sample, FloorError> {
    let workload = &options.workload;
    workload.check()?;
    for thread in 0..workload.threads {
        workload.area(thread, drive.geometry().blocks)?;
    }
    let servers = options.server_cores.len().clamp(1, workload.threads as usize);
    let mut listeners = Vec::new();
    for _ in 0..servers {
        let mut listener = Listener::bind("127.0.0.1:0")?;
        listener.set_options(options.socket.clone());
        let queue = match servers {
            1 => drive.open_only_queue(1)?,
            _ => drive.open_queue(1)?,
        };
        listeners.push((listener, queue));
    }
    let mut addresses: Vec<_> =
        listeners.iter().map(|(listener, _)| listener.local_addr()).collect();
    let mut links = Vec::new();
    if let Some(model) = options.link {
        for address in &mut addresses {
            let link = Link::start(model, *address)?;
            *address = link.address();
            links.push(link);
        }
    }
    let stop = AtomicBool::new(false);
    let (clock_sender, clock_receiver) = std::sync::mpsc::channel::<CpuClock>();

    thread::scope(|scope| {
        let servers: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(i, (listener, queue))| {
                let core = options.server_cores.get(i).copied();
                let expected = (workload.threads as usize - i).div_ceil(servers);
                let clocks = clock_sender.clone();
                let stop = &stop;
                thread::Builder::new()
                    .name(format!("floor server {i}"))
                    .spawn_scoped(scope, move || {
                        // The receiver waits for all clocks.
                        let _ = clocks.send(CpuClock::of_this_thread());
                        drop(clocks);
                        server::serve(&listener, expected, drive, queue, core, options.spin, stop)
                    })
                    // Out of threads: no useful measurement is possible.
                    .expect("start a thread")
            })
            .collect();
        drop(clock_sender);
        // The iteration ends when every server has sent its clock or has failed.
        let clocks: Vec<CpuClock> = clock_receiver.iter().collect();
        let target_cpu = || clocks.iter().map(CpuClock::used_ns).sum::<Option<u64>>();

        let sample =
            harness::run(options.window, workload.threads, target_cpu, |number, worker| {
                let address = addresses[number as usize % addresses.len()];
                writer::write(number, options, drive.geometry().blocks, address, worker)
            });
        stop.store(true, Ordering::Relaxed);
        let mut sample = sample;
        for server in servers {
            match server.join() {
                Ok(Ok(())) => {}
                // The server's error is the cause, the writers' (a reset) its consequence.
                Ok(Err(error)) => sample = Err(error),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        sample
    })
}

/// Number of writes per group of this workload; the raw exchange only counts with it.
fn writes_per_group(workload: &Workload) -> u64 {
    match workload.shape {
        Shape::Uniform { group, .. } => u64::from(group),
        Shape::Journal => 1,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{access::Access, workload::Pattern};

    fn options(workload: Workload) -> FloorOptions {
        FloorOptions {
            workload,
            window: Window {
                warm_up: Duration::from_millis(10),
                duration: Duration::from_millis(50),
            },
            writer_cores: Vec::new(),
            server_cores: Vec::new(),
            spin: SpinPolicy::HYBRID,
            socket: SocketOptions::default(),
            link: None,
        }
    }

    /// Runs until something was measured: on a busy machine, nothing may complete in a short
    /// window.
    fn run_until_written(options: &FloorOptions, drive: &Arc<dyn Drive>, writes: u64) -> Sample {
        let mut options = options.clone();
        for _ in 0..8 {
            let sample = run(&options, drive).unwrap();
            if sample.writes >= writes && sample.latencies.summary().count > 0 {
                return sample;
            }
            options.window.duration *= 3;
        }
        panic!("fewer than {writes} writes");
    }

    fn drive(spec: &str) -> Arc<dyn Drive> {
        riopipe_media::open_drive(spec).unwrap()
    }

    #[test]
    fn every_depth_size_and_spin_policy_works() {
        let drive = drive("mem:64M");
        for (queue_depth, size) in [(1, 4096), (7, 4096), (128, 4096), (32, 65536)] {
            for spin in [SpinPolicy::HYBRID, SpinPolicy::BLOCK] {
                let sample = run_until_written(
                    &FloorOptions {
                        spin,
                        ..options(Workload {
                            access: Access::Write,
                            shape: Shape::Uniform {
                                pattern: Pattern::Random,
                                size,
                                batch: 1,
                                group: 1,
                            },
                            queue_depth,
                            threads: 1,
                            seed: 3,
                        })
                    },
                    &drive,
                    1,
                );
                assert_eq!(sample.bytes, sample.writes * u64::from(size));
                assert_eq!(sample.groups, sample.writes);
                assert!(sample.target_cpu_ns.is_some_and(|ns| ns > 0));
            }
        }
    }

    #[test]
    fn more_writers_than_cores_and_servers() {
        let drive = drive("mem:64M");
        let cores = riopipe_net::allowed_cores();
        let sample = run_until_written(
            &FloorOptions {
                writer_cores: cores.clone(),
                server_cores: cores,
                ..options(Workload::journal(5, 4))
            },
            &drive,
            1,
        );
        // Of two blocks and one block.
        assert!(sample.bytes >= sample.writes * 4096 && sample.bytes <= sample.writes * 8192);
    }

    #[test]
    fn a_link_adds_its_delay() {
        let link = Some(LinkModel { rtt_ns: 2_000_000, ..LinkModel::default() });
        let options = FloorOptions { link, ..options(Workload::random_4k(1, 4)) };
        let sample = run_until_written(&options, &drive("mem:64M"), 1);
        assert!(sample.latencies.summary().p50_ns >= 1_990_000, "{:?}", sample.latencies.summary());
    }

    #[test]
    fn the_payload_is_stored() {
        // One lap over a small area; every block must then carry its own address.
        let drive = drive("mem:64K");
        let workload = Workload::random_4k(1, 4);
        run_until_written(&options(workload), &drive, 16);
        let mut queue = drive.open_queue(1).unwrap();
        for lba in 0..16 {
            let riopipe_media::Submitted::Done(Ok(Some(block))) = queue.read(0, lba, 1) else {
                panic!("memory answers at once");
            };
            assert_eq!(message::stamped_lba(&block), lba);
        }
    }

    #[test]
    fn a_drive_too_small_or_a_missing_core_is_reported() {
        let drive = drive("mem:64K");
        let error = run(&options(Workload::random_4k(2, 8)), &drive).unwrap_err();
        assert!(matches!(error, FloorError::Workload(_)), "{error}");
        let error = run(
            &FloorOptions { server_cores: vec![1023], ..options(Workload::random_4k(1, 8)) },
            &drive,
        )
        .unwrap_err();
        assert!(matches!(error, FloorError::Pin(_)), "{error}");
    }
}
