"""Teachers: a rollout in, the log-probability of each of its tokens out. One kind a file."""

from .adapter import AdapterTeacher as AdapterTeacher
from .in_process import InProcessTeacher as InProcessTeacher
from .loading import make_teacher as make_teacher
from .model import ModelTeacher as ModelTeacher
from .model import OffloadedTeacher as OffloadedTeacher
from .protocol import Teacher as Teacher
from .routing import RoutedTeacher as RoutedTeacher
from .routing import make_teachers as make_teachers
from .routing import name_of as name_of
from .routing import rows_by_teacher as rows_by_teacher
from .routing import teachers_of as teachers_of
from .self_teacher import SelfTeacher as SelfTeacher
from .self_teacher import StudentTeacher as StudentTeacher
from .server import ServerTeacher as ServerTeacher
from .states import divergences as divergences
from .states import score_with_states as score_with_states
