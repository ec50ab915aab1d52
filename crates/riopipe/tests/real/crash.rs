//! Shared parts of crash tests: targets that are killed and come back, and connections that break.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use riopipe::{
    BLOCK_BYTES, ClaimError, ConnectOptions, CreateOptions, MemberAddr, OpenError, OpenOptions,
    Place, Recovery, Seq, Stream, SubmitError, SubmitErrorKind, Until, Volume,
};
use riopipe_target::{Config, Running, Target};
use tempfile::TempDir;

use crate::site::{connect, create_options, fill};

/// The time limit of every wait.
pub(crate) const SOON: Duration = Duration::from_secs(120);

/// Options with a loss timeout of zero: a lost target is a failure at once.
pub(crate) fn impatient() -> OpenOptions {
    with_loss_timeout(Duration::ZERO)
}

pub(crate) fn with_loss_timeout(loss_timeout: Duration) -> OpenOptions {
    let connect = ConnectOptions { loss_timeout, ..connect() };
    OpenOptions { connect, ..OpenOptions::default() }
}

/// A target whose drives and log outlive it.
pub(crate) struct Node {
    dir: TempDir,
    config: Config,
    running: Option<Running>,
}

impl Node {
    /// A target with one `file:` drive, which has a volatile cache, and a `file:` log.
    pub(crate) fn new() -> Self {
        Self::with_drives(&["drive"])
    }

    /// A target with several such drives.
    pub(crate) fn with_drives(names: &[&str]) -> Self {
        Self::with(names, |path| format!("file:{path},size=32M"))
    }

    /// A target with one drive with power-loss protection, kept in a file.
    pub(crate) fn protected() -> Self {
        Self::with(&["drive"], |path| format!("ssd:optane,size=32M,file={path}"))
    }

    fn with(names: &[&str], spec: impl Fn(String) -> String) -> Self {
        static NODES: AtomicU32 = AtomicU32::new(0);
        let dir = TempDir::new().unwrap();
        let drive = |name: &&str| spec(dir.path().join(name).display().to_string());
        let drives: Vec<String> = names.iter().map(drive).collect();
        let drives: Vec<&str> = drives.iter().map(String::as_str).collect();
        let mut config = Config::on_loopback(&drives);
        let number = NODES.fetch_add(1, Ordering::Relaxed);
        config.subnqn = Some(format!("nqn.2026-01.org.example:node-{number}"));
        config.log = Some(format!("file:{}/log,size=256K", dir.path().display()));
        let mut node = Self { dir, config, running: None };
        node.start();
        node
    }

    /// As [`new`](Self::new), with a log of another kind, which is also in a file.
    pub(crate) fn with_log(kind: &str) -> Self {
        let mut node = Self::new();
        node.stop();
        std::fs::remove_file(node.path("log")).unwrap();
        node.config.log = Some(format!("{kind}:{},size=256K", node.path("log").display()));
        node.start();
        node
    }

    /// Starts the target, at its former address.
    pub(crate) fn start(&mut self) {
        let running = Target::start(&self.config).expect("the target starts");
        self.config.listen = vec![running.addresses()[0].to_string()];
        self.running = Some(running);
    }

    /// From the next start on, the same drive has a volatile cache.
    pub(crate) fn lose_protection(&mut self) {
        let plain = format!("file:{}", self.path("drive").display());
        self.config.namespaces = Config::on_loopback(&[&plain]).namespaces;
    }

    /// The number of FLUSHes that its drives have received in this incarnation.
    pub(crate) fn flushes(&self) -> u64 {
        self.running.as_ref().expect("it runs").stat().counter("flushes")
    }

    pub(crate) fn kill(&mut self) {
        self.running.take().expect("it runs").kill();
    }

    /// A clean stop.
    pub(crate) fn stop(&mut self) {
        self.running.take().expect("it runs").stop().unwrap();
    }

    pub(crate) fn nqn(&self) -> &str {
        self.config.subnqn.as_deref().expect("it has one")
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.config.listen[0].parse().unwrap()
    }

    pub(crate) fn member(&self) -> MemberAddr {
        self.addr().to_string().parse().unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The files of its drive and its log.
    pub(crate) fn files(&self) -> [PathBuf; 2] {
        ["drive", "log"].map(|name| self.path(name))
    }
}

pub(crate) fn members_of(nodes: &[Node]) -> Vec<MemberAddr> {
    nodes.iter().map(Node::member).collect()
}

/// Creates a volume on these targets, in stripes of four blocks. Returns its members.
pub(crate) fn volume_on(nodes: &[Node]) -> Vec<MemberAddr> {
    let members = members_of(nodes);
    let options = CreateOptions { unit_blocks: 4, ..create_options() };
    Volume::create("v", &members, &options).unwrap();
    members
}

/// Opens a volume; waits if its targets have not detected yet that the last owner has ended.
pub(crate) fn open_soon(members: &[MemberAddr], options: &OpenOptions) -> (Volume, Recovery) {
    let began = Instant::now();
    loop {
        match Volume::open("v", members, options) {
            Ok(opened) => return opened,
            Err(OpenError::Claim { error: ClaimError::Owned { .. }, .. })
                if began.elapsed() < SOON =>
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Writes one group; its tag is its version.
pub(crate) fn put(
    stream: &mut Stream,
    lba: u64,
    blocks: usize,
    version: u64,
    place: Place,
    durable: bool,
) -> Seq {
    loop {
        let mut buf = stream.buf(blocks * BLOCK_BYTES).unwrap();
        fill(&mut buf, lba, version);
        let group = stream.group().write(lba, buf, place).tag(version);
        match if durable { group.submit_durable() } else { group.submit() } {
            Ok(seq) => return seq,
            Err(SubmitError { kind: SubmitErrorKind::Full(_), .. }) => {
                stream.wait(Until::Space, Some(SOON)).unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Whether blocks hold the data of group `version` (`Some(true)`), zeroes (`Some(false)`), or other
/// data (`None`).
pub(crate) fn holds(stream: &mut Stream, lba: u64, blocks: usize, version: u64) -> Option<bool> {
    let (mut is, mut should) = (vec![0; blocks * BLOCK_BYTES], vec![0; blocks * BLOCK_BYTES]);
    stream.read(lba, &mut is, None).unwrap();
    fill(&mut should, lba, version);
    if is == should {
        return Some(true);
    }
    is.iter().all(|byte| *byte == 0).then_some(false)
}

/// Waits until `is_so` returns true; `what` describes that.
pub(crate) fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < SOON, "{what}: not within {SOON:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A relay between an initiator and a target that breaks connections.
pub(crate) struct Proxy {
    addr: SocketAddr,
    listener: TcpListener,
    state: Arc<ProxyState>,
}

/// Connections to a [`Proxy`] that fill its queue. They end when this is dropped, and the proxy
/// accepts others again.
pub(crate) struct Stall {
    queued: Vec<TcpStream>,
    state: Arc<ProxyState>,
}

impl Drop for Stall {
    fn drop(&mut self) {
        self.queued.clear();
        self.state.stalled.store(false, Ordering::SeqCst);
    }
}

struct ProxyState {
    to: SocketAddr,
    shut: AtomicBool,
    /// New connections are not accepted.
    stalled: AtomicBool,
    /// The thread that accepts connections waits for the end of a stall.
    waits: AtomicBool,
    ended: AtomicBool,
    through: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    pub(crate) fn to(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let through = Mutex::default();
        let [shut, stalled, waits, ended] = [(); 4].map(|()| AtomicBool::new(false));
        let state = Arc::new(ProxyState { to, shut, stalled, waits, ended, through });
        let own = Arc::clone(&state);
        let accepting = listener.try_clone().unwrap();
        std::thread::spawn(move || {
            for near in accepting.incoming() {
                while own.stalled.load(Ordering::SeqCst) {
                    own.waits.store(true, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(2));
                }
                if own.ended.load(Ordering::SeqCst) {
                    return;
                }
                own.join(near.unwrap());
            }
        });
        Self { addr, listener, state }
    }

    pub(crate) fn member(&self) -> MemberAddr {
        self.addr.to_string().parse().unwrap()
    }

    /// Breaks every connection.
    pub(crate) fn cut(&self) {
        for stream in self.state.through.lock().unwrap().drain(..) {
            // A connection that has ended already can't be broken.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Breaks the connection that was made last.
    pub(crate) fn cut_last(&self) {
        let mut through = self.state.through.lock().unwrap();
        // Its two ends are the last ones in the list.
        let ends = through.len() - 2;
        for stream in through.drain(ends..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// From now on no connection to the proxy succeeds or fails: the first packet is dropped, as a
    /// firewall does. Connections that were made before work.
    pub(crate) fn stall(&self) -> Stall {
        self.state.stalled.store(true, Ordering::SeqCst);
        // SAFETY: the call has no memory. It only makes the listener's queue shorter.
        assert_eq!(unsafe { libc::listen(self.listener.as_raw_fd(), 0) }, 0);
        let mut queued = vec![TcpStream::connect(self.addr).unwrap()];
        // The proxy takes this connection out of its queue, and no other.
        soon("the proxy waits", || self.state.waits.load(Ordering::SeqCst));
        while let Ok(stream) = TcpStream::connect_timeout(&self.addr, Duration::from_millis(500)) {
            queued.push(stream);
            assert!(queued.len() < 16, "the queue of length 0 never fills");
        }
        Stall { queued, state: Arc::clone(&self.state) }
    }

    /// Breaks every connection, and lets none through until [`open`](Self::open).
    pub(crate) fn shut(&self) {
        self.state.shut.store(true, Ordering::SeqCst);
        self.cut();
    }

    pub(crate) fn open(&self) {
        self.state.shut.store(false, Ordering::SeqCst);
    }
}

impl ProxyState {
    fn join(&self, near: TcpStream) {
        if self.shut.load(Ordering::SeqCst) {
            return;
        }
        let Ok(far) = TcpStream::connect(self.to) else { return };
        for (mut from, mut to) in [(&near, &far), (&far, &near)]
            .map(|(from, to)| (from.try_clone().unwrap(), to.try_clone().unwrap()))
        {
            to.set_nodelay(true).unwrap();
            std::thread::spawn(move || {
                let mut bytes = [0; 64 << 10];
                while let Ok(count @ 1..) = from.read(&mut bytes) {
                    if to.write_all(&bytes[..count]).is_err() {
                        break;
                    }
                }
                // In both cases the connection ends in both directions.
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
        self.through.lock().unwrap().extend([near, far]);
        // The relay may have been shut meanwhile.
        if self.shut.load(Ordering::SeqCst) {
            for stream in self.through.lock().unwrap().drain(..) {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        // Wakes the listener.
        let _ = TcpStream::connect(self.addr);
        self.cut();
    }
}
