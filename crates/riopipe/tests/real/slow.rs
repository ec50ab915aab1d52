//! A volume with a slow target: the quick targets must not drop the initiator while it waits for the
//! slow one. Errors name each target that failed, and the reason.

use std::net::TcpListener;
use std::time::Duration;

use riopipe::{CreateOptions, MemberAddr, OpenOptions, Volume};

use crate::crash::{Node, Proxy, soon, volume_on, with_loss_timeout};
use crate::late::Late;
use crate::site::create_options;

/// The keep-alive timeout of the targets: shorter than the time for which the test waits.
const KEEP_ALIVE: Duration = Duration::from_secs(6);

/// Numbers of connections to a target. Number 0 asks discovery for the name of the subsystem.
const ADMIN: usize = 1;
const DRIVES: usize = 2;

fn options() -> OpenOptions {
    let mut options = with_loss_timeout(Duration::ZERO);
    options.connect.keep_alive = KEEP_ALIVE;
    // Longer than any wait of the test.
    options.connect.timeout = Duration::from_secs(300);
    options
}

/// Lets a slow target answer at the end of a test, also if the test has failed.
struct Held<'a>(&'a Late);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// Runs `work` with a quick target and a slow one. The slow one sends nothing on its connection `held`
/// until the quick one has received keep-alives for longer than the keep-alive timeout.
fn with_a_slow_target<T: Send>(
    nodes: &[Node],
    held: usize,
    work: impl FnOnce(&[MemberAddr]) -> T + Send,
) -> T {
    let (quick, slow) = (Late::to(nodes[0].addr()), Late::to(nodes[1].addr()));
    slow.hold_only(held);
    let members = [quick.member(), slow.member()];
    std::thread::scope(|scope| {
        let working = scope.spawn(move || work(&members));
        let held = Held(&slow);
        soon("an answer of the slow one is held", || slow.is_waited_for());
        let before = quick.keep_alives();
        // The initiator sends three for each keep-alive timeout.
        soon("the quick one receives keep-alives", || {
            assert!(!working.is_finished(), "nothing ends before the slow target answers");
            quick.keep_alives() >= before + 4
        });
        drop(held);
        working.join().unwrap()
    })
}

#[test]
fn a_slow_target_breaks_no_other_connection_while_a_volume_is_opened() {
    let nodes = [Node::new(), Node::new()];
    let _ = volume_on(&nodes);
    for held in [ADMIN, DRIVES] {
        let (volume, _) =
            with_a_slow_target(&nodes, held, |members| Volume::open("v", members, &options()))
                .unwrap();
        volume.close().unwrap();
    }
}

#[test]
fn a_slow_target_breaks_no_other_connection_while_a_volume_is_created() {
    let nodes = [Node::new(), Node::new()];
    let create = CreateOptions { connect: options().connect, ..create_options() };
    with_a_slow_target(&nodes, DRIVES, |members| Volume::create("v", members, &create)).unwrap();
}

#[test]
fn every_target_that_fails_is_named_with_its_reason() {
    let nodes = [Node::new()];
    let closed = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (one, two) = (closed(), closed());
    let member = |addr: std::net::SocketAddr| MemberAddr {
        nqn: Some("nqn.2026-01.org.example:none".into()),
        ..addr.to_string().parse().unwrap()
    };
    let members = [member(one), nodes[0].member(), member(two)];
    let text = Volume::open("v", &members, &options()).unwrap_err().to_string();
    for words in ["2 of the volume's targets", &one.to_string(), &two.to_string(), "refused"] {
        assert!(text.contains(words), "{text}");
    }
    assert!(!text.contains(&nodes[0].addr().to_string()), "{text}");
}

/// If a target drops its connections while the initiator waits for another one, the error names that
/// target, and not a queue.
#[test]
fn a_target_that_drops_the_connection_meanwhile_is_named() {
    let nodes = [Node::new(), Node::new()];
    let _ = volume_on(&nodes);
    let (quick, slow) = (Late::to(nodes[0].addr()), Late::to(nodes[1].addr()));
    let breaks = Proxy::to(quick.addr());
    slow.hold_only(ADMIN);
    let members = [breaks.member(), slow.member()];
    let error = std::thread::scope(|scope| {
        let working = scope.spawn(|| Volume::open("v", &members, &options()));
        let held = Held(&slow);
        soon("an answer of the slow one is held", || slow.is_waited_for());
        soon("the other one is connected", || quick.keep_alives() > 0);
        breaks.cut();
        drop(held);
        working.join().unwrap().unwrap_err()
    });
    let text = error.to_string();
    let name = breaks.member().socket();
    assert!(text.contains(&format!("target {name}")), "{text}");
    assert!(text.contains("dropped the connection after"), "{text}");
}
